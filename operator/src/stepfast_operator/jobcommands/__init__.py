"""`stepfast status|explain|report|suspend|resume`: one job, wherever it runs: in a cluster or on this machine."""
