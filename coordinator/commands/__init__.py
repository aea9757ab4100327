"""The commands behind ``bin/``; each module has ``main(argv) -> exit status``."""
