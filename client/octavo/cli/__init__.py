"""The command `octavo`: one module per command, loaded when it is asked for."""
