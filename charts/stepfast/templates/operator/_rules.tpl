{{- /* What the operator may do where jobs are. No verb on secrets, configmaps or service accounts: pods name them, the kubelet reads them. */ -}}
{{- define "stepfast.operator.jobRules" -}}
- apiGroups: [stepfast.dev]
  resources: [trainingjobs]
  verbs: [list, watch, patch, delete]
- apiGroups: [stepfast.dev]
  resources: [trainingjobs/status]
  verbs: [patch]
- apiGroups: [stepfast.dev]
  resources: [trainingjobs/finalizers]  # to own pods and Services where owner references are checked
  verbs: [update]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, delete]
{{- if .Values.podGroups.kueue }}
- apiGroups: [""]
  resources: [pods]  # that no more pods come of a group that Kueue holds
  verbs: [patch]
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads]  # why a gang waits
  verbs: [get]
- apiGroups: [""]
  resources: [pods/status]  # that nothing runs of a pod that Kueue's finalizer keeps
  verbs: [patch]
{{- end }}
{{- if .Values.podGroups.volcano }}
- apiGroups: [scheduling.volcano.sh]
  resources: [podgroups]
  verbs: [get, create, delete]
{{- end }}
{{- if .Values.podGroups.coscheduling }}
- apiGroups: [scheduling.x-k8s.io]
  resources: [podgroups]
  verbs: [create, delete]
{{- end }}
- apiGroups: [""]
  resources: [services]
  verbs: [get, create]
- apiGroups: [""]
  resources: [events]
  verbs: [create]
{{- end -}}
