"""The ops, one family per file. Importing this package registers all of them."""
