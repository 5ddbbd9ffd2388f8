"""Programs on a GPU: their memory, what a call launches and sends, and calls like one before."""
