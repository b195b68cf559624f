"""The command line: thin shells over the engine, which import it only when a command runs."""
