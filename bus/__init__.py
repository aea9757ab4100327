"""How messages travel between nodes; knows nothing of reinforcement learning."""
