{{- define "holdfast.name" -}}
{{- /* A release may have dots in its name, a Service may not. */ -}}
{{- $release := replace "." "-" .Release.Name -}}
{{- ternary $release (printf "%s-holdfast" $release) (contains "holdfast" $release) | trunc 50 | trimSuffix "-" -}}
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

{{- define "holdfast.image" -}}
{{- $image := .Values.image -}}
{{- $repository := required "image.repository is empty: build an image from the Dockerfile, push it, and name it" $image.repository -}}
{{- printf "%s:%s" $repository ($image.tag | default .Chart.AppVersion) -}}
{{- with $image.digest }}@{{ . }}{{ end -}}
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

{{- /* The rules of a file, as the values have them. */ -}}
{{- define "holdfast.rules" -}}
{{- $settings := .root.Values.prometheusRule -}}
{{- $startSeconds := int .root.Values.start.seconds -}}
{{- range $group := .rules.groups -}}
{{- range $rule := $group.rules -}}
{{- $isOfStarts := eq ($rule.alert | default "") "HoldfastNotReady" -}}
{{- if and $isOfStarts (gt $startSeconds 1800) -}}
{{- $_ := set $rule "for" (printf "%ds" $startSeconds) -}}
{{- end -}}
{{- if and $rule.alert $settings.runbookBaseUrl -}}
{{- $page := base $rule.annotations.runbook_url -}}
{{- $_ := set $rule.annotations "runbook_url" (printf "%s/%s" (trimSuffix "/" $settings.runbookBaseUrl) $page) -}}
{{- end -}}
{{- $_ := mergeOverwrite $rule (index $settings.overrides ($rule.alert | default "") | default dict) -}}
{{- if and $isOfStarts (ne $rule.for "30m") -}}
{{- range $name, $text := $rule.annotations -}}
{{- $_ := set $rule.annotations $name (replace "30 minutes" $rule.for $text) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml .rules -}}
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

{{- /* What the chart sets itself, and what to set in its place. */ -}}
{{- define "holdfast.managed" -}}
--admin-api-key: keys.adminApiKey or keys.existingSecret
--admin-api-key-file: keys.adminApiKey or keys.existingSecret
--api-key: keys.apiKey or keys.existingSecret
--api-key-file: keys.apiKey or keys.existingSecret
--demo: demo
--drain-timeout: stop.drainSeconds
--enable-ssl-refresh: tls.existingSecret
--host: listenAddress
--metrics-auth: keys.metricsAuth
--model: model
--port: service.port
--ssl-ca-certs: networkPolicy, since probes show no certificate
--ssl-cert-reqs: networkPolicy, since probes show no certificate
--ssl-certfile: tls.existingSecret
--ssl-keyfile: tls.existingSecret
--tensor-parallel-size: gpu.count or gpu.tensorParallelSize
-tp: gpu.count or gpu.tensorParallelSize
--uds: service.port
VLLM_API_KEY: keys.apiKey or keys.existingSecret
HOLDFAST_IMAGE: image.repository, image.tag and image.digest
HOLDFAST_LOG_FORMAT: --log-format in extraArgs
{{- end -}}

{{- define "holdfast.checkExtra" -}}
{{- $managed := include "holdfast.managed" . | fromYaml -}}
{{- range .Values.extraArgs -}}
{{- $flag := splitList "=" . | first | replace "_" "-" -}}
{{- with index $managed $flag -}}
{{- fail (printf "extraArgs: %s is set by the chart: use %s" $flag .) -}}
{{- end -}}
{{- end -}}
{{- range .Values.extraEnv -}}
{{- $name := .name -}}
{{- $flag := .name | trimPrefix "HOLDFAST_" | lower | replace "_" "-" | printf "--%s" -}}
{{- with index $managed .name | default (ternary (index $managed $flag) "" (hasPrefix "HOLDFAST_" .name)) -}}
{{- fail (printf "extraEnv: %s is set by the chart: use %s" $name .) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "holdfast.check" -}}
{{- include "holdfast.checkExtra" . -}}
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
{{- if and $keys.existingSecret (or $keys.apiKey $keys.adminApiKey $keys.huggingFaceToken) -}}
{{- fail "keys.existingSecret takes the place of the keys in the values: leave those empty" -}}
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
