"""Questions of scale, answered by the time model before anything is built."""
