"""What a step would take on stated hardware: plain numbers, from the plan that a run makes."""
