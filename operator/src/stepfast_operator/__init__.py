"""Reconciles TrainingJobs: observe, decide, apply, write the status once."""
