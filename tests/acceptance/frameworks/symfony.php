// A bus with both transports, and a consumer of the first one.

use Symfony\Component\Messenger\Bridge\Amqp\Transport\AmqpTransportFactory;
use Symfony\Component\Messenger\MessageBus;
use Symfony\Component\Messenger\Middleware\SendMessageMiddleware;
use Symfony\Component\Messenger\Transport\Sender\SendersLocatorInterface;
use Symfony\Component\Messenger\Transport\Serialization\PhpSerializer;

final class Order { public $name = 'now'; }
final class Reminder { public $name = 'later'; }

foreach ($transports as $name => $options) {
    $made[$name] = (new AmqpTransportFactory())->createTransport(AMQP_URL, $options, new PhpSerializer());
}
$senders = new class($made) implements SendersLocatorInterface {
    private $made;
    public function __construct(array $made) { $this->made = $made; }
    public function getSenders(Envelope $envelope): iterable
    {
        $name = $envelope->getMessage() instanceof Reminder ? 'later' : 'orders';
        yield $name => $this->made[$name];
    }
};
$bus = new MessageBus([new DelayByDelayer(), new SendMessageMiddleware($senders)]);
$made['orders']->setup();
echo "ready\n";
fgets(STDIN);
$began = microtime(true);
$bus->dispatch(new Reminder(), [new DelayStamp(DELAY_MS)]);
$bus->dispatch(new Order());
$arrivals = [];
while (count($arrivals) < 2) {
    foreach ($made['orders']->get() as $envelope) {
        $arrivals[] = [$envelope->getMessage()->name, (int) round((microtime(true) - $began) * 1000)];
        $made['orders']->ack($envelope);
    }
    usleep(20000);
}
echo json_encode($arrivals), "\n";
