{{- /* Sizes of the memory tier. Pages of its tmpfs are charged to the agent's container, so the container's limit holds both. */ -}}

{{- /* A Kubernetes quantity in bytes. A bare number of a values file comes as a float. */ -}}
{{- define "stepfast.bytes" -}}
{{- $text := ternary (int64 . | toString) (toString .) (kindIs "float64" .) -}}
{{- $factors := dict "" 1 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- mulf (regexFind "^[0-9.]+" $text | float64) (get $factors (regexFind "[A-Za-z]*$" $text) | float64) | int64 -}}
{{- end -}}

{{- define "stepfast.memoryLimit" -}}
{{- $limit := .Values.sidecar.memory.limit -}}
{{- if eq (toString $limit) "auto" }}auto{{ else }}{{ include "stepfast.bytes" $limit }}{{ end -}}
{{- end -}}

{{- /* Of the container: what `sidecar.resources` says wins. */ -}}
{{- define "stepfast.sidecar.resources" -}}
{{- $memory := .Values.sidecar.memory -}}
{{- $overhead := include "stepfast.bytes" $memory.overhead | int64 -}}
{{- $computed := dict -}}
{{- if eq (toString $memory.limit) "auto" -}}
{{- $computed = dict "requests" (dict "memory" (toString $memory.overhead)) -}}
{{- else -}}
{{- $mebibytes := div (add (include "stepfast.bytes" $memory.limit | int64) $overhead 1048575) 1048576 -}}
{{- $size := printf "%dMi" $mebibytes -}}
{{- $computed = dict "requests" (dict "memory" $size) "limits" (dict "memory" $size) -}}
{{- end -}}
{{- toYaml (mergeOverwrite $computed (deepCopy .Values.sidecar.resources)) -}}
{{- end -}}
