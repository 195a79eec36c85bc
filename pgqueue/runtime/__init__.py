"""What waits: the worker's parent, its children, their loops, threads and signals.

The parent owns the queue and never imports the application. A child owns the user's code and
never touches the queue's tables. So a child can be killed at any instant, and the parent knows
exactly which attempts it held.
"""
