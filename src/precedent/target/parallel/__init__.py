"""One target model held by several processes (tensor parallelism): who leads, and how the others follow.

Nothing else imports it until `tensor_parallel=True` is asked for.
"""
