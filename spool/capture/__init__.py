"""Capture in the training process: intercept calls, snapshot them, hand them to a sink.

=====================  =====================================================
`session`              ``enable``, ``step``, ``disable``; what the user holds
`live`                 a capture that runs: its parts, steps and ends
`exits`, `keeper`      ends of the process; heartbeat and usage of the spool
`interceptor`          the function mode: forward calls
`engine`, `operators`  what the autograd engine runs
`recorder`             one call from before it runs to its end
`naming`, `denylist`   which functions are calls, and their counters
`filters`, `leftalone`  which calls the user wants, and which are none to capture
`castcache`            weights that autocast cast before they changed
`context`, `origins`   settings and place of a call, of backward ones too
`values`               walking through a call's arguments
`mutation`, `listcalls`  written arguments; list-of-tensor optimizer calls
`taking`, `snapshot`   the values of a call, copied at call time
`arena`                the memory that they wait in
`sink`, `ledger`       what is accepted, bounded by bytes, and counts per step
`watermark`            how full the spool may get
`remote`, `wire`, `writer_process`  the process that writes, and both ends of its pipes
`writers`              the threads that write, there or here
=====================  =====================================================
"""
