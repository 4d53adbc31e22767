// The sandbox program of the node tests: no registry needs to be reachable for it.
module prebook.dev/hack/kube/pause

go 1.26.0
