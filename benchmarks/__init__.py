"""What the parts cost on this machine. Prints figures; decides no test."""
