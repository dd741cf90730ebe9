"""What `scripts/gpu_check` and `scripts/tune_kernels` are made of.

A run is a list of jobs, a job a list of cases. A case is plain data with a name and a kind; a worker process turns
each into a result. So a kernel that crashes, hangs or poisons the device's context costs its own case and no other.
"""
