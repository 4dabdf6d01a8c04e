"""What a step computes (torch_executor.py) and how long it takes (roofline.py): two questions, answered apart."""
