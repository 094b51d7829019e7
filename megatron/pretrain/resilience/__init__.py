"""Extensions of the training loop: slow ranks and new plans, corrupt bits, snapshots in the hosts' memory."""
