"""What `d2amp NAME` runs, one module a command. Each has `add_arguments(parser)` and `run(args)`, which returns the
exit status."""
