"""What happened: step records, request timelines, the metric registry."""
