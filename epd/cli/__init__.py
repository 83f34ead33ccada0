"""The `epd` command: one thin file per subcommand."""
