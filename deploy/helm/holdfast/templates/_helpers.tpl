{{- define "holdfast.name" -}}
{{- if contains "holdfast" .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-holdfast" .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "holdfast.selector" -}}
app.kubernetes.io/name: holdfast
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "holdfast.labels" -}}
{{ include "holdfast.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | quote }}
{{- end -}}

{{- define "holdfast.secret" -}}
{{- .Values.keys.existingSecret | default (include "holdfast.name" .) -}}
{{- end -}}

{{- define "holdfast.keys" -}}
{{- $keys := .Values.keys -}}
{{- if $keys.existingSecret -}}
{{- toYaml $keys.existingKeys -}}
{{- else -}}
{{- with $keys.apiKey }}
- api-key
{{- end }}
{{- with $keys.adminApiKey }}
- admin-api-key
{{- end }}
{{- with $keys.huggingFaceToken }}
- hugging-face-token
{{- end }}
{{- end -}}
{{- end -}}

{{- define "holdfast.claims" -}}
- state
{{- if or (not .Values.demo) .Values.volumes.kernels.existingClaim }}
- kernels
{{- end }}
{{- if or (not (or .Values.demo (hasPrefix "/" .Values.model))) .Values.volumes.models.existingClaim }}
- models
{{- end }}
{{- end -}}

{{- define "holdfast.claim" -}}
{{- $volume := index .root.Values.volumes .volume -}}
{{- $volume.existingClaim | default (printf "%s-%s" (include "holdfast.name" .root) .volume) -}}
{{- end -}}

{{- define "holdfast.gpus" -}}
{{- ternary 0 .Values.gpu.count .Values.demo -}}
{{- end -}}

{{- define "holdfast.resources" -}}
{{- $resources := ternary .Values.demoResources .Values.resources .Values.demo | default dict -}}
{{- $limits := $resources.limits | default dict | deepCopy -}}
{{- with include "holdfast.gpus" . | int -}}
{{- $_ := set $limits $.Values.gpu.resource . -}}
{{- end -}}
{{- toYaml (dict "requests" ($resources.requests | default dict) "limits" $limits) -}}
{{- end -}}

{{- define "holdfast.podLabels" -}}
{{- toYaml (merge (include "holdfast.selector" . | fromYaml) .Values.podLabels) -}}
{{- end -}}

{{- define "holdfast.mostReplicas" -}}
{{- ternary .Values.autoscaling.maxReplicas .Values.replicas .Values.autoscaling.enabled -}}
{{- end -}}

{{- define "holdfast.checkModel" -}}
{{- $isMounted := false -}}
{{- range prepend .Values.extraVolumeMounts (dict "mountPath" "/home/holdfast/.cache") -}}
{{- $directory := printf "%s/" (trimSuffix "/" .mountPath) -}}
{{- if hasPrefix $directory (printf "%s/" $.Values.model) -}}{{- $isMounted = true -}}{{- end -}}
{{- end -}}
{{- if and (hasPrefix "/" .Values.model) (not $isMounted) -}}
{{- fail (printf "model: nothing is mounted at %s: add extraVolumes and extraVolumeMounts" .Values.model) -}}
{{- end -}}
{{- end -}}

{{- define "holdfast.check" -}}
{{- include "holdfast.checkModel" . -}}
{{- if and (not .Values.demo) (not .Values.model) -}}
{{- fail "model is empty: name what to serve, or set demo=true" -}}
{{- end -}}
{{- if and .Values.demo .Values.model -}}
{{- fail "demo=true serves its own model: leave model empty" -}}
{{- end -}}
{{- $keys := .Values.keys -}}
{{- if and (eq $keys.metricsAuth "api-key") (not (has "api-key" (include "holdfast.keys" . | fromYamlArray))) -}}
{{- fail "keys.metricsAuth=api-key needs a key: set keys.apiKey, or keys.existingSecret with api-key in keys.existingKeys" -}}
{{- end -}}
{{- if and $keys.apiKey (eq $keys.apiKey $keys.adminApiKey) -}}
{{- fail "keys.adminApiKey is keys.apiKey, and would open /admin to every client: choose another" -}}
{{- end -}}
{{- if hasKey (.Values.resources.limits | default dict) .Values.gpu.resource -}}
{{- fail (printf "resources.limits: %s is set by gpu.count" .Values.gpu.resource) -}}
{{- end -}}
{{- if and .Values.autoscaling.enabled (gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas)) -}}
{{- fail "autoscaling.minReplicas is above autoscaling.maxReplicas" -}}
{{- end -}}
{{- if and (gt (include "holdfast.mostReplicas" . | int) 1) (ne .Values.volumes.accessMode "ReadWriteMany") -}}
{{- fail "several replicas share the volumes: set volumes.accessMode=ReadWriteMany" -}}
{{- end -}}
{{- end -}}
