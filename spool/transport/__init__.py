"""Shards over a TLS socket: for hosts without shared storage.

The training host captures into a small spool of its own, and `spool.transport.shipper`
sends what is published there to a receiver, which publishes it into the real one. What is
acknowledged is durable there and deleted here; what is not is sent again. Everything else,
restart and limits and ends, is as on shared storage.
"""
