"""The collectives: records, calls, ops with derivative rules; sums in one type and order."""
