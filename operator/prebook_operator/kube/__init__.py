"""Everything that speaks to the API server: transport, client, server-side apply, the leader lease, and the errors
they end in."""
