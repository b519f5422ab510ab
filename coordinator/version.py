"""The version of this software, in one place for the command line and the server."""

VERSION = "0.1.0"
