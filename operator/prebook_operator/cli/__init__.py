"""The `prebook` command: one module per subcommand."""
