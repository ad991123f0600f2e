"""What a job used, waited for and how it ended: watched, judged, kept."""
