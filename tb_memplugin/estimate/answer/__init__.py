"""What an estimate is asked and answers: workloads, targets, changes, peaks, and what fits."""
