"""What would speculation gain on recorded traces? Replays them without a model: the recorded answer is the target's."""
