{{- define "holdfast.name" -}}
{{- /* A release may have dots in its name, a Service may not. */ -}}
{{- $release := replace "." "-" .Release.Name -}}
{{- ternary $release (printf "%s-holdfast" $release) (contains "holdfast" $release) | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "holdfast.selector" -}}
app.kubernetes.io/name: holdfast
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- /* Not empty if the engine runs on several nodes. */ -}}
{{- define "holdfast.hasFollowers" -}}
{{- if gt (int .Values.nodes.count) 1 }}true{{ end -}}
{{- end -}}

{{- /* The labels of the pods that answer clients: all pods, or the heads of the groups. */ -}}
{{- define "holdfast.servers" -}}
{{ include "holdfast.selector" . }}
{{- if include "holdfast.hasFollowers" . }}
app.kubernetes.io/component: head
{{- end }}
{{- end -}}

{{- define "holdfast.followers" -}}
{{ include "holdfast.selector" . }}
app.kubernetes.io/component: follower
{{- end -}}

{{- /* LeaderWorkerSet makes a headless Service of this name, which must not be that of the Service for
       clients. Names of pods and labels made of it are up to 14 characters longer. */ -}}
{{- define "holdfast.group" -}}
{{- printf "%s-nodes" (include "holdfast.name" . | trunc 43 | trimSuffix "-") -}}
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

{{- define "holdfast.tensorParallelSize" -}}
{{- .Values.gpu.tensorParallelSize | default (mul (include "holdfast.gpus" . | int) (int .Values.nodes.count)) -}}
{{- end -}}

{{- define "holdfast.graceSeconds" -}}
{{- add .Values.stop.preStopSeconds .Values.stop.drainSeconds .Values.stop.engineSeconds -}}
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
{{- $own := include "holdfast.selector" .root | fromYaml -}}
{{- if ne .role "server" -}}{{- $_ := set $own "app.kubernetes.io/component" .role -}}{{- end -}}
{{- toYaml (merge $own .root.Values.podLabels) -}}
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

{{- /* All pods of the release. vLLM and NCCL choose their ports themselves. */ -}}
{{- define "holdfast.peers" -}}
- podSelector:
    matchLabels: {{- include "holdfast.selector" . | nindent 6 }}
{{- end -}}

{{- define "holdfast.egress" -}}
# To any address: the DNS cache of a node has a link-local one.
- ports:
    - {protocol: UDP, port: 53}
    - {protocol: TCP, port: 53}
# OpenShift's DNS pods listen here. A policy sees the port of the pod, not that of its Service.
- ports:
    - {protocol: UDP, port: 5353}
    - {protocol: TCP, port: 5353}
  to:
    - namespaceSelector:
        matchLabels:
          kubernetes.io/metadata.name: openshift-dns
{{- if .Values.networkPolicy.egress.public }}
- ports:
    - {protocol: TCP, port: 80}
    - {protocol: TCP, port: 443}
  to:
    - ipBlock:
        cidr: 0.0.0.0/0
        # Addresses that are not public, https://www.iana.org/assignments/iana-ipv4-special-registry,
        # and 168.63.129.16, where Azure has its own service.
        except:
          - 0.0.0.0/8
          - 10.0.0.0/8
          - 100.64.0.0/10
          - 127.0.0.0/8
          - 168.63.129.16/32
          - 169.254.0.0/16
          - 172.16.0.0/12
          - 192.0.0.0/24
          - 192.168.0.0/16
          - 198.18.0.0/15
          - 224.0.0.0/4
          - 240.0.0.0/4
    # The allocated public range; addresses that embed an IPv4 address are outside it.
    - ipBlock:
        cidr: 2000::/3
        except:
          - 2002::/16
{{- end }}
{{- if include "holdfast.hasFollowers" . }}
- to: {{- include "holdfast.peers" . | nindent 4 }}
{{- end }}
{{- with .Values.networkPolicy.egress.rules }}{{ toYaml . | nindent 0 }}{{ end }}
{{- end -}}

{{- /* The number in the manifest of a kind with a name, or nothing. With autoscaling it is the present
       one: an upgrade that left it out would have Kubernetes go to its default, which is 1. */ -}}
{{- define "holdfast.replicas" -}}
{{- $values := .root.Values -}}
{{- if $values.autoscaling.enabled -}}
{{- lookup .apiVersion .kind .root.Release.Namespace .name | dig "spec" "replicas" "" -}}
{{- else -}}
{{- $values.replicas -}}
{{- end -}}
{{- end -}}

{{- define "holdfast.mostReplicas" -}}
{{- ternary .Values.autoscaling.maxReplicas .Values.replicas .Values.autoscaling.enabled -}}
{{- end -}}

{{- define "holdfast.checkModel" -}}
{{- $isMounted := false -}}
{{- range prepend .Values.extraVolumeMounts (dict "mountPath" "/home/holdfast/models") -}}
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
--headless: nodes.count
--host: listenAddress
--master-addr: nodes.count
--metrics-auth: keys.metricsAuth
--model: model
--nnodes: nodes.count
--node-key-file: nodes.existingSecret
--node-port: nodes.count
--node-rank: nodes.count
--node-ssl-certfile: the encryption of the cluster's network, since followers get no --ssl-ca-certs
--node-ssl-keyfile: the encryption of the cluster's network, since followers get no --ssl-ca-certs
--port: service.port
--shutdown-timeout: stop.drainSeconds
--ssl-ca-certs: networkPolicy, since probes show no certificate
--ssl-cert-reqs: networkPolicy, since probes show no certificate
--ssl-certfile: tls.existingSecret
--ssl-keyfile: tls.existingSecret
--tensor-parallel-size: gpu.count or gpu.tensorParallelSize
-n: nodes.count
-r: nodes.count
-tp: gpu.count or gpu.tensorParallelSize
--uds: service.port
VLLM_API_KEY: keys.apiKey or keys.existingSecret
HF_HOME: volumes.models, or HF_HUB_CACHE for a volume of your own
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

{{- define "holdfast.checkNodes" -}}
{{- if include "holdfast.hasFollowers" . -}}
{{- if not (include "holdfast.gpus" . | int) -}}
{{- fail "nodes.count: each node needs GPUs: set gpu.count, and leave demo=false" -}}
{{- end -}}
{{- if not .Values.nodes.existingSecret -}}
{{- fail "nodes.count: several nodes need a shared key: make a Secret with the key node-key, and name it in nodes.existingSecret" -}}
{{- end -}}
{{- range .Values.extraEnv -}}
{{- if eq .name "VLLM_HOST_IP" -}}{{- fail "extraEnv: with several nodes, the chart sets VLLM_HOST_IP to the address of each pod" -}}{{- end -}}
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
{{- $pods := mul (include "holdfast.mostReplicas" . | int) (int .Values.nodes.count) -}}
{{- if and (gt $pods 1) (ne .Values.volumes.accessMode "ReadWriteMany") -}}
{{- fail "several pods share the volumes: set volumes.accessMode=ReadWriteMany" -}}
{{- end -}}
{{- include "holdfast.checkNodes" . -}}
{{- end -}}
