"""Running captured calls again on the checking host, and measuring what comes out.

`batch` supervises a job without importing torch; `worker` is its child process,
which resolves, executes and measures one call after the other.
"""
