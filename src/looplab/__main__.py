from looplab.cli.main import main

main()
