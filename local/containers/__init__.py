"""What runs in the containers of `docker-compose.yml`, beside what runs everywhere."""
