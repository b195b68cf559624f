"""Trains and evaluates the adapter that makes SmolLM2-135M-Instruct an agent of the order desk."""
