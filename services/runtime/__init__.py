"""What every process does the same way: settings, logs, metrics, signals, its session with the scheduler."""
