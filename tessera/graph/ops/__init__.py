"""The ops, one family per file. `tessera.graph` loads every module of this folder, and its ops and
functions register themselves."""
