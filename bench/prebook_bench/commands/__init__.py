"""One module per subcommand: its arguments, and what it does with them."""
