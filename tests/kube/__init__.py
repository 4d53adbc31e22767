"""A real Kubernetes for tests: control plane, fake nodes and one real node."""
