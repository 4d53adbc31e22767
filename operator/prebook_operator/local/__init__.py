"""The local runner: the pods of a DisaggregatedModel as processes of this machine.

``prebook up FILE`` renders a model with the operator's own render code and then does what a kubelet would do with
the result: volumes become folders, pod addresses become loopback addresses, probes, restarts, preStop and grace
periods work as in a cluster. It schedules nothing, isolates nothing and never talks to an API server.
"""
