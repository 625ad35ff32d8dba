"""State in host memory: optimizer_cpu_offload."""
