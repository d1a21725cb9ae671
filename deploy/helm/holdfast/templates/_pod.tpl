{{- /* The metadata and spec of a pod. `root` is the whole context. `role` is server for an engine
       on one node; on several nodes it is head or follower. */ -}}
{{- define "holdfast.podTemplate" -}}
{{- $role := .role -}}
{{- $keys := ternary list (include "holdfast.keys" .root | fromYamlArray) (eq $role "follower") -}}
{{- with .root -}}
{{- $root := . -}}
metadata:
  # Without the version of the chart, so that a new version alone restarts nothing.
  labels: {{- include "holdfast.podLabels" (dict "root" . "role" $role) | nindent 4 }}
  {{- with .Values.podAnnotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  automountServiceAccountToken: false
  enableServiceLinks: false
  # preStop, then the drain, then the end of the engine.
  terminationGracePeriodSeconds: {{ include "holdfast.graceSeconds" . }}
  {{- with .Values.gpu.runtimeClassName }}
  runtimeClassName: {{ . | quote }}
  {{- end }}
  {{- with .Values.priorityClassName }}
  priorityClassName: {{ . | quote }}
  {{- end }}
  {{- with .Values.image.pullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.serviceAccountName }}
  serviceAccountName: {{ . | quote }}
  {{- end }}
  securityContext: {{- toYaml .Values.podSecurityContext | nindent 4 }}
  {{- with .Values.initContainers }}
  initContainers: {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: holdfast
      image: {{ include "holdfast.image" . | quote }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      {{- if eq $role "follower" }}
      {{- include "holdfast.followProcess" . | nindent 6 }}
      {{- else }}
      {{- include "holdfast.serveProcess" . | nindent 6 }}
      {{- end }}
      env:
        - name: HOLDFAST_LOG_FORMAT
          value: json
        - name: HOLDFAST_IMAGE
          value: {{ include "holdfast.image" . | quote }}
        - name: HF_HOME
          value: /home/holdfast/models
        {{- if has "hugging-face-token" (include "holdfast.keys" . | fromYamlArray) }}
        - name: HF_TOKEN
          valueFrom:
            secretKeyRef: {name: {{ include "holdfast.secret" . | quote }}, key: hugging-face-token}
        {{- end }}
        {{- if ne $role "server" }}
        # Where the other pods of the group reach vLLM's processes in this one.
        - name: VLLM_HOST_IP
          valueFrom:
            fieldRef: {fieldPath: status.podIP}
        {{- end }}
        {{- with .Values.extraEnv }}{{ toYaml . | nindent 8 }}{{ end }}
      resources: {{- include "holdfast.resources" . | nindent 8 }}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities:
          drop: [ALL]
      volumeMounts:
        - {name: state, mountPath: /home/holdfast/.local/state/holdfast}
        - {name: kernels, mountPath: /home/holdfast/.cache}
        # Not inside another claim: root may not create the directory for it on NFS with root_squash.
        - {name: models, mountPath: /home/holdfast/models}
        - {name: scratch, mountPath: /tmp}
        - {name: shared-memory, mountPath: /dev/shm}
        {{- if without $keys "hugging-face-token" }}
        - {name: keys, mountPath: /etc/holdfast/keys, readOnly: true}
        {{- end }}
        {{- if ne $role "server" }}
        - {name: node-key, mountPath: /etc/holdfast/node, readOnly: true}
        {{- end }}
        {{- if and .Values.tls.existingSecret (ne $role "follower") }}
        - {name: tls, mountPath: /etc/holdfast/tls, readOnly: true}
        {{- end }}
        {{- with .Values.extraVolumeMounts }}{{ toYaml . | nindent 8 }}{{ end }}
  volumes:
    {{- $claims := include "holdfast.claims" . | fromYamlArray }}
    {{- range list "state" "kernels" "models" }}
    - name: {{ . }}
      {{- if has . $claims }}
      persistentVolumeClaim:
        claimName: {{ include "holdfast.claim" (dict "root" $root "volume" .) | quote }}
      {{- else }}
      emptyDir: {}
      {{- end }}
    {{- end }}
    - name: scratch
      emptyDir: {sizeLimit: {{ .Values.scratch }}}
    - name: shared-memory
      emptyDir: {medium: Memory, sizeLimit: {{ .Values.sharedMemory }}}
    {{- with without $keys "hugging-face-token" }}
    # As files, which the server reads again when they change, as the PodMonitor does.
    - name: keys
      secret:
        secretName: {{ include "holdfast.secret" $root | quote }}
        defaultMode: 0440
        items:
          {{- range . }}
          - {key: {{ . }}, path: {{ . }}}
          {{- end }}
    {{- end }}
    {{- if ne $role "server" }}
    - name: node-key
      secret:
        secretName: {{ .Values.nodes.existingSecret | quote }}
        defaultMode: 0440
        items:
          - {key: node-key, path: node-key}
    {{- end }}
    {{- if and .Values.tls.existingSecret (ne $role "follower") }}
    - name: tls
      secret: {secretName: {{ .Values.tls.existingSecret | quote }}, defaultMode: 0440}
    {{- end }}
    {{- with .Values.extraVolumes }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- with .Values.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.topologySpreadConstraints }}
  topologySpreadConstraints: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}
{{- end -}}

{{- /* How the container of a server is started, asked and stopped. */ -}}
{{- define "holdfast.serveProcess" -}}
{{- $keys := include "holdfast.keys" . | fromYamlArray -}}
{{- $scheme := ternary "HTTPS" "HTTP" (ne .Values.tls.existingSecret "") -}}
args:
  - serve
  - {{ ternary "--demo" .Values.model .Values.demo | quote }}
  {{- with .Values.listenAddress }}
  - {{ printf "--host=%s" . | quote }}
  {{- end }}
  - --port=8000
  - --drain-timeout={{ .Values.stop.drainSeconds | int }}
  {{- if has "api-key" $keys }}
  - --api-key-file=/etc/holdfast/keys/api-key
  {{- end }}
  {{- if has "admin-api-key" $keys }}
  - --admin-api-key-file=/etc/holdfast/keys/admin-api-key
  {{- end }}
  {{- if .Values.tls.existingSecret }}
  - --ssl-certfile=/etc/holdfast/tls/tls.crt
  - --ssl-keyfile=/etc/holdfast/tls/tls.key
  - --enable-ssl-refresh
  {{- end }}
  - --metrics-auth={{ .Values.keys.metricsAuth }}
  {{- if include "holdfast.gpus" . | int }}
  - --tensor-parallel-size={{ include "holdfast.tensorParallelSize" . }}
  {{- end }}
  {{- if include "holdfast.hasFollowers" . }}
  - --nnodes={{ .Values.nodes.count | int }}
  # Its own address, because its name may not resolve yet.
  - --master-addr=$(VLLM_HOST_IP)
  - --node-key-file=/etc/holdfast/node/node-key
  {{- end }}
  {{- with .Values.extraArgs }}{{ toYaml . | nindent 2 }}{{ end }}
ports:
  - name: http
    containerPort: 8000
# /startupz turns 200 with the first READY, after the worst case was served.
# 10 s x the threshold is start.seconds, rounded up.
startupProbe:
  httpGet: {path: /startupz, port: http, scheme: {{ $scheme }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: {{ div (add .Values.start.seconds 9) 10 }}
# /readyz is 200 only in READY. A 503 is a definite answer and a timeout may be a busy moment
# of the node, but Kubernetes treats both as a miss: so the second one counts.
readinessProbe:
  httpGet: {path: /readyz, port: http, scheme: {{ $scheme }}}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
# /livez is 200 while the process can become useful: it is 503 only in FAILED, and does not
# wait for the engine. Three misses of 10 s mean that the process is stuck, not busy.
livenessProbe:
  httpGet: {path: /livez, port: http, scheme: {{ $scheme }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
lifecycle:
  preStop:
    sleep:
      seconds: {{ .Values.stop.preStopSeconds }}
{{- end -}}

{{- /* The same for a follower, which gets the model and all flags from the head. */ -}}
{{- define "holdfast.followProcess" -}}
args:
  - follow
  # A name in the headless Service of the group; LeaderWorkerSet sets the variable.
  - $(LWS_LEADER_ADDRESS)
  {{- with .Values.listenAddress }}
  - {{ printf "--host=%s" . | quote }}
  {{- end }}
  - --port=8001
  - --node-key-file=/etc/holdfast/node/node-key
  # All pods of a group that is deleted are stopped at once, and the requests that the head drains
  # need the ranks of this pod. In a rollout, followers are stopped after the head.
  - --head-drain-timeout={{ add .Values.stop.preStopSeconds .Values.stop.drainSeconds }}
ports:
  - name: http
    containerPort: 8001
# A follower answers from its first second, without an engine too, so it needs no startup probe.
# /readyz is 200 while its ranks run and are locked, and the head is connected.
readinessProbe:
  httpGet: {path: /readyz, port: http, scheme: HTTP}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
livenessProbe:
  httpGet: {path: /livez, port: http, scheme: HTTP}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
{{- end -}}
