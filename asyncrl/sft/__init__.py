"""`asyncrl sft`: supervised fine-tuning with the learner's models, packing, optimizer, checkpoints and export.

This package contains what differs from reinforcement learning: the settings, rows that include the answers, their order
(there is no replay, and nothing is generated), the loss and the loop. It uses no engine, socket or environment.
"""
