{{- /* What the operator's pod and the agents' have in common. */ -}}

{{- define "stepfast.storage.uri" -}}
{{- required "storage.uri is required: where checkpoints go, as in --set storage.uri=abfs://container@account.dfs.core.windows.net/path" .Values.storage.uri -}}
{{- end -}}

{{- /* Refuses what would only show once a job runs. */ -}}
{{- define "stepfast.check" -}}
{{- if and .Values.azure.workloadIdentity.clientId .Values.azure.managedIdentity.clientId -}}
{{- fail "azure.workloadIdentity.clientId and azure.managedIdentity.clientId exclude each other: one identity writes the checkpoints" -}}
{{- end -}}
{{- if and (hasPrefix "file:" .Values.storage.uri) (not .Values.storage.volume) -}}
{{- fail "storage.uri is a file:// path: storage.volume and storage.mountPath must say which volume is mounted there" -}}
{{- end -}}
{{- if and .Values.storage.volume (not .Values.storage.mountPath) -}}
{{- fail "storage.volume needs storage.mountPath: where it is mounted in operator and agent" -}}
{{- end -}}
{{- if and (hasPrefix "file:" .Values.storage.uri) .Values.storage.mountPath (not (hasPrefix (printf "%s/" (trimSuffix "/" .Values.storage.mountPath)) (printf "%s/" (.Values.storage.uri | trimPrefix "file://" | trimSuffix "/")))) -}}
{{- fail (printf "storage.uri %s is not below storage.mountPath %s: checkpoints would go with the pod" .Values.storage.uri .Values.storage.mountPath) -}}
{{- end -}}
{{- end -}}

{{- /* No capability, no way to more: called with the uid. The agent is root, because the kubelet's folders are. */ -}}
{{- define "stepfast.containerSecurity" -}}
runAsUser: {{ . }}
runAsGroup: {{ . }}
runAsNonRoot: {{ ne (int .) 0 }}
privileged: false
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "stepfast.serviceAccountAnnotations" -}}
{{- with .Values.azure.workloadIdentity -}}
{{- if .clientId }}
annotations:
  azure.workload.identity/client-id: {{ .clientId | quote }}
  {{- with .tenantId }}
  azure.workload.identity/tenant-id: {{ . | quote }}
  {{- end }}
{{- end }}
{{- end -}}
{{- end -}}

{{- define "stepfast.podLabels" -}}
{{- if .Values.azure.workloadIdentity.clientId }}
azure.workload.identity/use: "true"
{{- end }}
{{- end -}}

{{- define "stepfast.identityEnv" -}}
{{- with .Values.azure.managedIdentity.clientId }}
- {name: AZURE_CLIENT_ID, value: {{ . | quote }}}
{{- end }}
{{- end -}}

{{- define "stepfast.envFrom" -}}
{{- with .Values.storage.secretName }}
envFrom:
  - secretRef: {name: {{ . | quote }}}
{{- end }}
{{- end -}}

{{- define "stepfast.storageMount" -}}
{{- if .Values.storage.volume }}
- {name: storage, mountPath: {{ .Values.storage.mountPath | quote }}}
{{- end }}
{{- end -}}

{{- define "stepfast.storageVolume" -}}
{{- with .Values.storage.volume }}
- name: storage
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- /* Egress that both need. Neither the API server nor the storage has an address to name here, so ports alone limit them. */ -}}
{{- define "stepfast.egress" -}}
- ports:
    - {port: 53, protocol: UDP}
    - {port: 53, protocol: TCP}
- ports:
    {{- range concat .Values.networkPolicy.apiServerPorts .Values.networkPolicy.storagePorts | uniq }}
    - {port: {{ . }}, protocol: TCP}
    {{- end }}
{{- if not .Values.azure.workloadIdentity.clientId }}
# The node's metadata service: tokens of managed identities.
- to: [{ipBlock: {cidr: 169.254.169.254/32}}]
  ports: [{port: 80, protocol: TCP}]
{{- end }}
{{- with .Values.networkPolicy.extraEgress }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "stepfast.metricsIngress" -}}
- ports: [{port: metrics, protocol: TCP}]
  from:
    {{- if .Values.networkPolicy.metricsFrom }}
    {{- toYaml .Values.networkPolicy.metricsFrom | nindent 4 }}
    {{- else }}
    - namespaceSelector: {}
    {{- end }}
{{- end -}}
