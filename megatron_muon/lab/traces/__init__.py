"""Reading torch profiler's Chrome traces: where the time of a step goes on each rank."""
