from tinyrec.cli import app

app()
