{{- /* Name of the release's objects: the release's name, with the chart's where that does not hold it already. */ -}}
{{- define "prebook.fullname" -}}
{{- $chart := default .Chart.Name .Values.nameOverride -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains $chart .Release.Name -}}
{{- .Release.Name | trunc 53 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $chart | trunc 53 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "prebook.operatorName" -}}
{{- include "prebook.fullname" . }}-operator
{{- end -}}

{{- /* Cluster-scoped names carry the namespace: two releases may have one name in two namespaces. */ -}}
{{- define "prebook.clusterName" -}}
{{- include "prebook.operatorName" . }}-{{ .Release.Namespace }}
{{- end -}}

{{- define "prebook.serviceAccountName" -}}
{{- if .Values.serviceAccount.name -}}
{{- .Values.serviceAccount.name -}}
{{- else if .Values.serviceAccount.create -}}
{{- include "prebook.operatorName" . -}}
{{- else -}}
default
{{- end -}}
{{- end -}}

{{- define "prebook.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{- /* Engines admit the operator by the first of these labels: it never changes. */ -}}
{{- define "prebook.selectorLabels" -}}
app.kubernetes.io/name: prebook
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "prebook.labels" -}}
{{ include "prebook.selectorLabels" . }}
app.kubernetes.io/part-of: prebook
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- /* Annotations of the CRDs; empty when they are to go with the release. */ -}}
{{- define "prebook.crdAnnotations" -}}
{{- if .Values.crds.keep -}}
helm.sh/resource-policy: keep
{{- end -}}
{{- end -}}

{{- /* The namespaces watched in scope Namespaced, as a JSON list. */ -}}
{{- define "prebook.namespaces" -}}
{{- .Values.watchNamespaces | default (list .Release.Namespace) | toJson -}}
{{- end -}}

{{- define "prebook.readsNodes" -}}
{{- if or (eq .Values.rbac.nodeReader "Always") (and (eq .Values.rbac.nodeReader "Auto") (eq .Values.scope "Cluster")) -}}
true
{{- end -}}
{{- end -}}

{{- define "prebook.aggregates" -}}
{{- if or (eq .Values.rbac.aggregatedRoles "Always") (and (eq .Values.rbac.aggregatedRoles "Auto") (eq .Values.scope "Cluster")) -}}
true
{{- end -}}
{{- end -}}

{{- define "prebook.subjects" -}}
- kind: ServiceAccount
  name: {{ include "prebook.serviceAccountName" . }}
  namespace: {{ .Release.Namespace }}
{{- end -}}

{{- /* PSS restricted, for every container of the chart. */ -}}
{{- define "prebook.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "prebook.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end -}}
