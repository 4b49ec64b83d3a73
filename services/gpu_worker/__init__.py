"""gpu_worker: the process that holds the weights, the paged KV pool, attention and sampling.

It runs what the scheduler plans, one forward pass per plan, and answers with token ids. It never decides what runs and
never frees a page. The only service that imports torch.
"""
