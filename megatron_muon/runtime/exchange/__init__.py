"""Messages of a step: pieces and directions, and those between the homes of one matrix."""
