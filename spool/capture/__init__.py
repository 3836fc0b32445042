"""Capture in the training process: intercept calls, snapshot them, hand them to a sink.

=====================  =====================================================
`session`              ``enable``, ``step``, ``disable``; what the user holds
`live`                 a capture that runs: its parts, steps and ends
`exits`, `keeper`      ends of the process; heartbeat and usage of the spool
`interceptor`          the function mode: forward calls
`recorder`             one call from arguments to record
`naming`, `denylist`   which functions are calls, and their counters
`filters`              which calls the user wants
`snapshot`             values at call time, in host memory
`mutation`, `listcalls`  written arguments; list-of-tensor optimizer calls
`context`, `values`    settings and place of a call; walking its arguments
`sink`, `ledger`       bounded queue, writers, counts per step
`watermark`            how full the spool may get
=====================  =====================================================
"""
