"""What Gangway needs of others: `python -m benchmarks.packages.canary`, newest releases; `install`, sizes, times."""
