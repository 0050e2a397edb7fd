{{- /* Names, labels, images: what more than one object must agree on. */ -}}

{{- define "stepfast.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains "stepfast" .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-stepfast" (.Release.Name | trunc 31 | trimSuffix "-") -}}
{{- end -}}
{{- end -}}

{{- define "stepfast.operator.name" -}}{{ include "stepfast.fullname" . }}-operator{{- end -}}
{{- define "stepfast.sidecar.name" -}}{{ include "stepfast.fullname" . }}-sidecar{{- end -}}

{{- define "stepfast.spares.priorityClass" -}}{{ include "stepfast.fullname" . }}-spares{{- end -}}

{{- define "stepfast.mirrors.secret" -}}
{{- .Values.sidecar.mirrors.secretName | default (printf "%s-mirrors" (include "stepfast.sidecar.name" .)) -}}
{{- end -}}

{{- /* The operator finds the agents' pods by name and component: never another name. */ -}}
{{- define "stepfast.operator.selector" -}}
app.kubernetes.io/name: stepfast
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "stepfast.sidecar.selector" -}}
app.kubernetes.io/name: stepfast
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: sidecar
{{- end -}}

{{- define "stepfast.labels" -}}
app.kubernetes.io/part-of: stepfast
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "stepfast.operator.labels" -}}
{{ include "stepfast.operator.selector" . }}
{{ include "stepfast.labels" . }}
{{- end -}}

{{- define "stepfast.sidecar.labels" -}}
{{ include "stepfast.sidecar.selector" . }}
{{ include "stepfast.labels" . }}
{{- end -}}

{{- /* What belongs to neither of the two. */ -}}
{{- define "stepfast.release.labels" -}}
app.kubernetes.io/name: stepfast
app.kubernetes.io/instance: {{ .Release.Name }}
{{ include "stepfast.labels" . }}
{{- end -}}

{{- /* Called with (list $ .Values.operator.image). */ -}}
{{- define "stepfast.image" -}}
{{- $root := index . 0 -}}
{{- $image := index . 1 -}}
{{- with $root.Values.image.registry }}{{ trimSuffix "/" . }}/{{ end -}}
{{- $image.repository -}}
{{- if $image.digest -}}
@{{ $image.digest }}
{{- else -}}
:{{ $image.tag | default $root.Values.image.tag | default $root.Chart.AppVersion }}
{{- end -}}
{{- end -}}
